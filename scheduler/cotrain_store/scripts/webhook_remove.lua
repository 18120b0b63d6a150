-- webhook_remove: forget a tenant's webhook with all that it was not notified of yet. Twice is harmless.
local hook, events, due, due_tenants = unpack(KEYS)
local args = cjson.decode(ARGV[1])

local known = redis.call('EXISTS', hook)
redis.call('DEL', hook, events, due)
redis.call('ZREM', due_tenants, args.tenant)
return known
