-- sampler: make a sampler, or give the one there is. Its weights must still be there.
local sampler, session, weights, users, of_session = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local id, record, idle_ms, ref = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local tenant, max_samplers = ARGV[5], tonumber(ARGV[6])

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
if count_samplers(tenant) >= max_samplers then
  return 'SAMPLERS'
end
redis.call('SET', sampler, record)
end_after(sampler, idle_ms)
list_sampler(tenant, id, idle_ms)
redis.call('SADD', of_session, id)
if ref ~= '' then
  redis.call('SADD', users, 's:' .. id)
end
return record
