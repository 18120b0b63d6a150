-- tick: let time pass for the store, and end what is due, some at a time. Fenced by the scheduler's epoch.
local epoch_key, clock, ends = KEYS[1], KEYS[2], KEYS[3]
local epoch, passed_ms, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
local now = clock_in(passed_ms)
local due = redis.call('ZRANGEBYSCORE', ends, '-inf', now, 'LIMIT', 0, most)
redis.call('ZREM', ends, '') -- a full Redis stops no script that has removed something
for _, key in ipairs(due) do
  end_now(key)
end
redis.call('SET', clock, now)
return #due
