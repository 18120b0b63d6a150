-- run_pause: exclude a live run from cycles until it is resumed. The pause ends with the run, so only a live run
-- can be paused.
local args = cjson.decode(ARGV[1])

if redis.call('HGET', args.prefix .. 'log:' .. args.run, 'state') ~= 'live' then
  return 'CLOSED'
end
redis.call('HSET', 'cotrain:runs:paused', args.run, args.pause)
return 'OK'
