-- busy_minute: who used the devices of a pool in a minute, for how many seconds, as one JSON text: a client
-- reads that ten times as fast as a thousand fields. Reads only.
local seconds = {}
local row = redis.call('HGETALL', KEYS[1])
for n = 1, #row, 2 do
  local tenant = string.match(row[n], '^device_s|(.+)$')
  if tenant then
    seconds[tenant] = row[n + 1]
  end
end
return cjson.encode(seconds)
