-- unread: a part of other scripts: the results of a tenant that lie here and were never sent, and their
-- bytes. Each is listed from its commit on until it is sent or expires, so that no count can drift.
local function redis_now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end

local function note_unread(tenant, request, size, ttl_ms)
  local sizes = 'cotrain:tenant:' .. tenant .. ':unread'
  if redis.call('HSETNX', sizes, request, size) == 1 then
    redis.call('HINCRBY', sizes, 'bytes', size)
    local expires_at = string.format('%.0f', redis_now_ms() + ttl_ms)
    redis.call('ZADD', 'cotrain:tenant:' .. tenant .. ':unread_until', expires_at, request)
  end
end

local function note_read(tenant, request)
  local sizes = 'cotrain:tenant:' .. tenant .. ':unread'
  local size = redis.call('HGET', sizes, request)
  if size then
    redis.call('HINCRBY', sizes, 'bytes', 0 - size)
    redis.call('HDEL', sizes, request)
    redis.call('ZREM', 'cotrain:tenant:' .. tenant .. ':unread_until', request)
  end
end

local function unread_bytes(tenant)
  local listed = 'cotrain:tenant:' .. tenant .. ':unread_until'
  for _, request in ipairs(redis.call('ZRANGEBYSCORE', listed, '-inf', redis_now_ms(), 'LIMIT', 0, 1000)) do
    note_read(tenant, request) -- it has expired
  end
  return tonumber(redis.call('HGET', 'cotrain:tenant:' .. tenant .. ':unread', 'bytes') or 0)
end
