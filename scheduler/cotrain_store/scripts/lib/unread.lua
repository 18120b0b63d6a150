-- unread: stored and never sent results of a tenant, and their bytes. Each is listed from its commit until it is sent
-- or expires, so that the total cannot drift.
-- needs: ages
local function record_unread(tenant, request, size, ttl_ms)
  local sizes = 'cotrain:tenant:' .. tenant .. ':unread'
  if redis.call('HSETNX', sizes, request, size) == 1 then
    local bytes = redis.call('HINCRBY', sizes, 'bytes', size)
    redis.call('ZADD', 'cotrain:tenants:unread', bytes, tenant)
    redis.call('ZADD', 'cotrain:tenant:' .. tenant .. ':unread_until', clock_in(ttl_ms), request)
  end
end

local function record_read(tenant, request)
  local sizes = 'cotrain:tenant:' .. tenant .. ':unread'
  local size = redis.call('HGET', sizes, request)
  if size then
    local bytes = redis.call('HINCRBY', sizes, 'bytes', 0 - size)
    redis.call('HDEL', sizes, request)
    redis.call('ZREM', 'cotrain:tenant:' .. tenant .. ':unread_until', request)
    if bytes > 0 then
      redis.call('ZADD', 'cotrain:tenants:unread', bytes, tenant)
    else
      redis.call('ZREM', 'cotrain:tenants:unread', tenant)
    end
  end
end

local function unread_bytes(tenant)
  local listed = 'cotrain:tenant:' .. tenant .. ':unread_until'
  for _, request in ipairs(redis.call('ZRANGEBYSCORE', listed, '-inf', clock_ms(), 'LIMIT', 0, 1000)) do
    record_read(tenant, request) -- expired
  end
  return tonumber(redis.call('HGET', 'cotrain:tenant:' .. tenant .. ':unread', 'bytes') or 0)
end
