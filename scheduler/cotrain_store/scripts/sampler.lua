-- sampler: make a sampler, or give the one there is. Its weights must still be there.
local sampler, session, weights, users, of_session = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local of_tenant = KEYS[6]
local id, record, idle_ms, ref = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local now_ms, max_samplers = tonumber(ARGV[5]), tonumber(ARGV[6])

local known = redis.call('GET', sampler)
if known then
  return known
end
if redis.call('HEXISTS', session, 'finished_at') == 1 then
  return 'FINISHED'
end
if ref ~= '' and redis.call('EXISTS', weights) == 0 then
  return 'GONE'
end
redis.call('ZREMRANGEBYSCORE', of_tenant, '-inf', now_ms)
if redis.call('ZCARD', of_tenant) >= max_samplers then
  return 'SAMPLERS'
end
redis.call('SET', sampler, record, 'PX', idle_ms)
redis.call('ZADD', of_tenant, string.format('%.0f', now_ms + idle_ms), id)
redis.call('SADD', of_session, id)
if ref ~= '' then
  redis.call('SADD', users, 's:' .. id)
end
return record
