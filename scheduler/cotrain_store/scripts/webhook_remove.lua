-- webhook_remove: delete a tenant's webhook and its undelivered events. Idempotent.
local hook, events, due, due_tenants = unpack(KEYS)
local args = cjson.decode(ARGV[1])

local known = redis.call('EXISTS', hook)
redis.call('DEL', hook, events, due)
redis.call('ZREM', due_tenants, args.tenant)
return known
