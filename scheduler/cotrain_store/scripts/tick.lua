-- tick: let time pass for the store, and end what is due, some at a time. Fenced by the scheduler's epoch.
-- needs: ages
local epoch_key, clock, ends = unpack(KEYS)
local args = cjson.decode(ARGV[1])

if redis.call('GET', epoch_key) ~= args.epoch then
  return 'FENCED'
end
local now = clock_in(args.passed_ms)
local due = redis.call('ZRANGEBYSCORE', ends, '-inf', now, 'LIMIT', 0, args.most)
redis.call('ZREM', ends, '') -- a full Redis stops no script that has removed something
for _, key in ipairs(due) do
  end_now(key)
end
redis.call('SET', clock, now)
return #due
