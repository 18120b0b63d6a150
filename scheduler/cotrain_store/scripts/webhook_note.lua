-- webhook_note: queue an event for a tenant's webhook that no other script causes: its test.
-- needs: webhook_event
local args = cjson.decode(ARGV[1])
return note_event(args.tenant, args.kind, args.data) or 'NONE'
