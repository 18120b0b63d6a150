-- audit: append an act to the stream of all acts and to that of its tenant. Returns the ids of the entries.
local args = cjson.decode(ARGV[1])
local lines = {}

for n, stream in ipairs(args.streams) do
  lines[n] = redis.call('XADD', stream, 'MAXLEN', '~', args.kept, '*', 'event', args.event, 'details', args.details,
    'tenant', args.tenant, 'key_id', args.key_id, 'key_name', args.key_name)
end
return lines
