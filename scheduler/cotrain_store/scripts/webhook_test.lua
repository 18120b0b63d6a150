-- webhook_test: queue a test event for a tenant's webhook.
-- needs: webhook_event
local args = cjson.decode(ARGV[1])
return queue_event(args.tenant, args.kind, args.data) or 'NONE'
