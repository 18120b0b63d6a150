-- samplers: list of a tenant's samplers, each from its save until it ends, and bytes of the weights of saves without a
-- name, which only their samplers keep. Sizes are listed individually, so that the total cannot drift.
-- needs: ages
local function sampler_keys(tenant)
  return 'cotrain:tenant:' .. tenant .. ':samplers', 'cotrain:tenant:' .. tenant .. ':sampler_bytes'
end

local function list_sampler(tenant, id, idle_ms)
  local listed = sampler_keys(tenant)
  redis.call('ZADD', listed, clock_in(idle_ms), id)
end

local function remove_sampler(tenant, id)
  local listed, sizes = sampler_keys(tenant)
  local size = redis.call('HGET', sizes, id)
  if size then
    redis.call('HINCRBY', sizes, 'bytes', 0 - size)
    redis.call('HDEL', sizes, id)
  end
  redis.call('ZREM', listed, id)
end

local function count_samplers(tenant)
  local listed, now_ms = sampler_keys(tenant), clock_ms()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', listed, '-inf', now_ms, 'LIMIT', 0, 1000)) do
    remove_sampler(tenant, id)
  end
  return redis.call('ZCOUNT', listed, now_ms, '+inf')
end

local function record_sampler_bytes(tenant, id, size)
  local listed, sizes = sampler_keys(tenant)
  if redis.call('ZSCORE', listed, id) and redis.call('HSETNX', sizes, id, size) == 1 then
    redis.call('HINCRBY', sizes, 'bytes', size)
  end
end

-- End the longest idle samplers until the others have less than `most` bytes. Returns false if that is impossible.
local function make_sampler_room(tenant, most, idle_ms, rest_ms)
  local listed, sizes = sampler_keys(tenant)
  local function has_room()
    return tonumber(redis.call('HGET', sizes, 'bytes') or 0) < most
  end
  if has_room() then
    return true
  end
  local rested = clock_in(idle_ms - rest_ms)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', listed, '-inf', rested, 'LIMIT', 0, 1000)) do
    if redis.call('HEXISTS', sizes, id) == 1 then
      end_now('cotrain:sampler:' .. id)
      remove_sampler(tenant, id)
    end
    if has_room() then
      return true
    end
  end
  return false
end
