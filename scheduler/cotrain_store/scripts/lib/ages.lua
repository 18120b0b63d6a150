-- ages: expiry of keys by the store's own clock (`tick`), because Redis' clock follows the host's time of day.
-- It started at the time of day, and counts ms.
-- needs: weights_release
local function clock_ms()
  local now_ms = redis.call('GET', 'cotrain:clock')
  if now_ms then
    return tonumber(now_ms)
  end
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end

local function clock_in(ms)
  return string.format('%.0f', clock_ms() + ms)
end

-- Set the expiry of a key, replacing any earlier one.
local function end_after(key, ttl_ms)
  redis.call('ZADD', 'cotrain:ends', clock_in(ttl_ms), key)
end

-- Shorten the expiry of a key that has one. The ZREM makes a full Redis reject no write of the script.
local function end_sooner(key, ttl_ms)
  redis.call('ZREM', 'cotrain:ends', '')
  redis.call('ZADD', 'cotrain:ends', 'XX', 'LT', clock_in(ttl_ms), key)
end

-- Count a result in a file of the spool. Such a result begins with `k`, `r` or `t` (`ResultKind`).
local function count_file(result, by)
  local segment = string.match(result, '^[krt]spool:([^:]+):')
  if segment and redis.call('HINCRBY', 'cotrain:spool:results', segment, by) <= 0 then
    redis.call('HDEL', 'cotrain:spool:results', segment)
  end
end

local function end_now(key)
  local result = string.match(key, '^cotrain:result:') and redis.call('GET', key)
  if result then
    count_file(result, -1)
  end
  local sampler = string.match(key, '^cotrain:sampler:') and redis.call('GET', key)
  redis.call('DEL', key)
  redis.call('ZREM', 'cotrain:ends', key)
  local weights = sampler and cjson.decode(sampler).weights
  if weights and weights ~= cjson.null then
    release_weights(weights)
  end
end

-- Store the result of a request. Returns false if it already has one; the first result is kept.
local function put_result(request, result, ttl_ms)
  local key = 'cotrain:result:' .. request
  if not redis.call('SET', key, result, 'NX') then
    return false
  end
  end_after(key, ttl_ms)
  count_file(result, 1)
  return true
end
