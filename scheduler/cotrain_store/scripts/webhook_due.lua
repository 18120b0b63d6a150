-- webhook_due: return the next due event of each due tenant, or only of `args.tenant` if it is set.
-- Fenced by the epoch of the webhook sender.
-- needs: fence, ages
local now, found = clock_in(0), {}
local tenants = args.tenant and { args.tenant }
  or redis.call('ZRANGEBYSCORE', 'cotrain:webhooks:due', '-inf', now, 'LIMIT', 0, args.most)
for _, tenant in ipairs(tenants) do
  local key = 'cotrain:tenant:' .. tenant .. ':webhook'
  local event = redis.call('ZRANGEBYSCORE', key .. '_due', '-inf', now, 'LIMIT', 0, 1)[1]
  local hook = redis.call('HMGET', key, 'url', 'secret')
  if event and hook[1] then
    found[#found + 1] = { tenant, hook[1], hook[2], event, redis.call('HGET', key .. '_events', event), now }
  end
end
return found
