-- lease: become or stay the scheduler. A new holder gets a new epoch, which fences the old one.
local lease, epoch = unpack(KEYS)
local args = cjson.decode(ARGV[1])

local holder = redis.call('GET', lease)
if holder == args.name and redis.call('GET', epoch) == args.epoch then
  redis.call('PEXPIRE', lease, args.ttl_ms)
  return args.epoch
end
-- A life longer than any that is given: the host's time was set back, and the holder may be long dead.
local is_over = holder and redis.call('PTTL', lease) > args.ttl_ms
if holder and holder ~= args.name and not is_over then
  return ''
end
redis.call('DEL', lease) -- a full Redis stops no script that has removed something
redis.call('SET', lease, args.name, 'PX', args.ttl_ms)
return tostring(redis.call('INCR', epoch))
