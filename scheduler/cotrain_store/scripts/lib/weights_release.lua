-- weights_release: record that weights lost a reference. The sweep of their pool checks them next.
local function release_weights(ref)
  local record = redis.call('HGET', 'cotrain:weights:' .. ref, 'record')
  if record then
    local pool = cjson.decode(record).pool
    redis.call('ZADD', 'cotrain:{' .. pool .. '}:released', 0, ref)
  end
end
