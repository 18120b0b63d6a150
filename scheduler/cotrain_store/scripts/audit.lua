-- audit: note one act in each of the streams that have it: that of all acts, and that of its tenant. Returns the lines' ids.
local args = cjson.decode(ARGV[1])
local lines = {}

for n, stream in ipairs(KEYS) do
  lines[n] = redis.call('XADD', stream, 'MAXLEN', '~', args.kept, '*', 'event', args.event, 'details', args.details,
    'tenant', args.tenant, 'key_id', args.key_id, 'key_name', args.key_name)
end
return lines
