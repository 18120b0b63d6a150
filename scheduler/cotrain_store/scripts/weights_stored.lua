-- weights_stored: the folder of sampler weights is durable: any worker can read them now.
-- Fenced by the worker's epoch. The first digest stays.
local epoch_key, weights, content, unstored = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local epoch, ref, digest, size = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
redis.call('SREM', unstored, ref)
local known = redis.call('HGET', weights, 'digest')
if not known then
  return 'GONE'
end
if known == '' then
  redis.call('HSET', weights, 'digest', digest, 'size', size)
  redis.call('SADD', content, ref)
end
return 'OK'
