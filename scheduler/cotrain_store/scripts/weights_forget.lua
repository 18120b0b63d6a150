-- weights_forget: forget weights, unless something refers to them again by now, or a save owes them.
-- Fenced by the worker's epoch. LAST: nothing else has their content.
local epoch_key, weights, users, of_pool, external = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local epoch, prefix, ref, folder = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
local row = redis.call('HMGET', weights, 'digest', 'worker', 'optimizer', 'checkpoint')
if not row[1] or row[4] or in_use(ref) then
  return 'KEPT'
end
redis.call('DEL', weights, users)
redis.call('SREM', of_pool, ref)
redis.call('SREM', external, folder)
if row[1] == '' then
  redis.call('SREM', prefix .. 'unstored:' .. row[2], ref)
  return 'KEPT'
end
if row[3] and row[3] ~= '' then
  redis.call('SREM', prefix .. 'optimizer:' .. row[3], ref)
end
local content = prefix .. 'content:' .. row[1]
redis.call('SREM', content, ref)
return redis.call('EXISTS', content) == 0 and 'LAST' or 'SHARED'
