-- weights_lost: nothing can make these weights again: the named save that owes them fails.
-- Fenced by the worker's epoch. Stored weights, and those of a sampler, are left alone.
local epoch_key, weights, notify, unstored = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local of_pool, external, users = KEYS[5], KEYS[6], KEYS[7]
local epoch, ref, prefix, result, ttl_ms, closing = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local folder = ARGV[7]

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
local text = redis.call('HGET', weights, 'checkpoint')
if not text then
  return 'KEPT'
end
local record = cjson.decode(text)
local member = record.run .. '/' .. record.kind .. '/' .. record.name
redis.call('ZREM', 'cotrain:checkpoint:' .. member .. ':pending', ref)
end_save(weights, ref, record, prefix, result, ttl_ms, notify, closing)
redis.call('SREM', unstored, ref)
redis.call('SREM', of_pool, ref)
redis.call('SREM', external, folder)
redis.call('DEL', weights, users)
return 'OK'
