-- busy_minute: return the device seconds of each tenant of a pool in a minute, as one JSON text. A client reads
-- it ten times as fast as a thousand fields. Read-only.
local args = cjson.decode(ARGV[1])
local seconds = {}
local row = redis.call('HGETALL', args.minute)
for n = 1, #row, 2 do
  local tenant = string.match(row[n], '^device_s|(.+)$')
  if tenant then
    seconds[tenant] = row[n + 1]
  end
end
return cjson.encode(seconds)
