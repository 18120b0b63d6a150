-- run_pause: no cycle takes a live run until it is resumed. The pause ends with the run, hence only here.
local log, paused = unpack(KEYS)
local args = cjson.decode(ARGV[1])

if redis.call('HGET', log, 'state') ~= 'live' then
  return 'CLOSED'
end
redis.call('HSET', paused, args.run, args.pause)
return 'OK'
