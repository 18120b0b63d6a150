-- sample_requeue: put back at the front, in order, what a worker runs, or ran when it died.
-- Fenced by the worker's epoch. What was cancelled meanwhile ends here.
local epoch_key, claimed, cancelled, last_claim = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local refs, notify = KEYS[5], KEYS[6]
local epoch, prefix, deaths = ARGV[1], ARGV[2], ARGV[3]
local result, ttl_ms, size = ARGV[4], tonumber(ARGV[5]), ARGV[6]
local lives = { now = tonumber(ARGV[7]), record = tonumber(ARGV[8]), told = tonumber(ARGV[9]) }

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
local resolved, count = {}, 0
for _, request in ipairs(redis.call('SMEMBERS', cancelled)) do
  if finish(refs, lives, request, result, ttl_ms, 1, size) then
    resolved[#resolved + 1] = request
  end
end
redis.call('DEL', cancelled, last_claim)
local request = redis.call('RPOP', claimed)
while request do
  local sample = 'cotrain:sample:' .. request
  local row = redis.call('HMGET', sample, 'tenant', 'lane')
  local load = prefix .. 'samples:' .. row[1]
  redis.call('LPUSH', prefix .. 'waiting:' .. row[2] .. ':' .. row[1], request)
  redis.call('HSET', sample, 'state', 'waiting')
  redis.call('HINCRBY', sample, 'starts', deaths)
  if deaths == '0' then
    redis.call('HDEL', sample, 'deaths') -- it was counted in advance, and nobody died
  end
  redis.call('HINCRBY', load, 'running', -1)
  if redis.call('HINCRBY', load, 'waiting', 1) == 1 then
    redis.call('LPUSH', prefix .. 'sample_ring', row[1])
  end
  count = count + 1
  request = redis.call('RPOP', claimed)
end
redis.call('PUBLISH', notify, table.concat(resolved, '\n'))
return count
