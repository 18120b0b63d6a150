-- webhook_note: tell a tenant's webhook of something that no other script makes true: its test.
-- needs: webhook_event
local args = cjson.decode(ARGV[1])
return note_event(args.tenant, args.kind, args.data) or 'NONE'
