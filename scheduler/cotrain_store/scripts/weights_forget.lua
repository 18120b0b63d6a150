-- weights_forget: forget sampler weights, unless something refers to them again by now.
-- Fenced by the worker's epoch. LAST: nothing else has their content.
local epoch_key, weights, users, of_pool = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local epoch, prefix, ref = ARGV[1], ARGV[2], ARGV[3]

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
local row = redis.call('HMGET', weights, 'digest', 'worker')
if not row[1] or in_use(ref) then
  return 'KEPT'
end
redis.call('DEL', weights, users)
redis.call('SREM', of_pool, ref)
if row[1] == '' then
  redis.call('SREM', prefix .. 'unstored:' .. row[2], ref)
  return 'KEPT'
end
local content = prefix .. 'content:' .. row[1]
redis.call('SREM', content, ref)
return redis.call('EXISTS', content) == 0 and 'LAST' or 'SHARED'
