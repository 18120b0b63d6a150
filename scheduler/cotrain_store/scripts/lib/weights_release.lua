-- weights_release: something has ceased to refer to weights: who sweeps their pool looks at them next.
local function release_weights(ref)
  local record = redis.call('HGET', 'cotrain:weights:' .. ref, 'record')
  if record then
    local pool = cjson.decode(record).pool
    redis.call('ZADD', 'cotrain:{' .. pool .. '}:released', 0, ref)
  end
end
