-- webhook_remove: delete a tenant's webhook and its undelivered events. Idempotent.
local args = cjson.decode(ARGV[1])
local hook = 'cotrain:tenant:' .. args.tenant .. ':webhook'

local known = redis.call('EXISTS', hook)
redis.call('DEL', hook, hook .. '_events', hook .. '_due')
redis.call('ZREM', 'cotrain:webhooks:due', args.tenant)
return known
