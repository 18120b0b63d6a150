-- lease: become or stay the scheduler. A new holder gets a new epoch, which fences the old one.
local lease, epoch = KEYS[1], KEYS[2]
local me, ttl_ms, mine = ARGV[1], ARGV[2], ARGV[3]
local holder = redis.call('GET', lease)
if holder == me and redis.call('GET', epoch) == mine then
  redis.call('PEXPIRE', lease, ttl_ms)
  return mine
end
-- A life longer than any that is given: the host's time was set back, and the holder may be long dead.
local is_over = holder and redis.call('PTTL', lease) > tonumber(ttl_ms)
if holder and holder ~= me and not is_over then
  return ''
end
redis.call('DEL', lease) -- a full Redis stops no script that has removed something
redis.call('SET', lease, me, 'PX', ttl_ms)
return tostring(redis.call('INCR', epoch))
