-- weights_unused: list the stored sampler weights of a pool that nothing refers to.
local weights = KEYS[1]
local unused = {}
for _, ref in ipairs(redis.call('SMEMBERS', weights)) do
  local row = redis.call('HMGET', 'cotrain:weights:' .. ref, 'record', 'digest', 'size')
  if row[2] and row[2] ~= '' and not in_use(ref) then
    unused[#unused + 1] = row
  end
end
return unused
