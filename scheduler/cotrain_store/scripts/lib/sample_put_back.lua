-- sample_put_back: return a worker's running requests to the front of their queues, in order, each with `crashes` more
-- crashes. Cancelled requests end here; `cancel` has their result, ttl_ms and size. Ended requests are added to
-- `resolved`. Returns the number of the others.
-- needs: sample_finish
local function put_back(prefix, worker, crashes, lives, cancel, resolved)
  local claimed, cancelled = prefix .. 'claimed:' .. worker, prefix .. 'cancelled:' .. worker
  for _, request in ipairs(redis.call('SMEMBERS', cancelled)) do
    if finish(lives, request, cancel.result, cancel.ttl_ms, 1, cancel.size) then
      resolved[#resolved + 1] = request
    end
  end
  redis.call('DEL', cancelled, prefix .. 'last_claim:' .. worker)
  local count = 0
  local request = redis.call('RPOP', claimed)
  while request do
    local sample = 'cotrain:sample:' .. request
    local row = redis.call('HMGET', sample, 'tenant', 'lane')
    local load = prefix .. 'samples:' .. row[1]
    redis.call('LPUSH', prefix .. 'waiting:' .. row[2] .. ':' .. row[1], request)
    redis.call('HSET', sample, 'state', 'waiting')
    redis.call('HINCRBY', sample, 'starts', crashes)
    if crashes == 0 then
      redis.call('HDEL', sample, 'deaths') -- counted in advance, but no process crashed
    end
    redis.call('HINCRBY', load, 'running', -1)
    if redis.call('HINCRBY', load, 'waiting', 1) == 1 then
      redis.call('LPUSH', prefix .. 'sample_ring', row[1])
    end
    count = count + 1
    request = redis.call('RPOP', claimed)
  end
  return count
end
