-- webhook_event: queue an event for a tenant's webhook, in the transaction that causes it.
-- needs: ages
local MAX_WAITING = 1000 -- maximum pending events of a tenant; further ones are only counted

local function queue_event(tenant, kind, data)
  local hook = 'cotrain:tenant:' .. tenant .. ':webhook'
  local id = redis.call('HGET', hook, 'id')
  if not id then
    return
  end
  local events = 'cotrain:tenant:' .. tenant .. ':webhook_events'
  if redis.call('HLEN', events) >= MAX_WAITING then
    redis.call('HINCRBY', hook, 'dropped', 1)
    return 'FULL'
  end
  local event = id .. '-' .. redis.call('HINCRBY', hook, 'events', 1)
  local body = cjson.encode({
    id = event, type = kind, created_at = tonumber(redis.call('TIME')[1]), data = data,
  })
  local now = clock_in(0)
  redis.call('HSET', events, event, now .. '|0|' .. body)
  redis.call('ZADD', 'cotrain:tenant:' .. tenant .. ':webhook_due', now, event)
  redis.call('ZADD', 'cotrain:webhooks:due', 'LT', now, tenant)
  return event
end
