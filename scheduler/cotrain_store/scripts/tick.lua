-- tick: advance the store's clock, and end due keys, at most `most` at a time. Fenced by the scheduler's epoch.
-- needs: ages
local epoch_key, clock, ends = unpack(KEYS)
local args = cjson.decode(ARGV[1])

if redis.call('GET', epoch_key) ~= args.epoch then
  return 'FENCED'
end
local now = clock_in(args.passed_ms)
local due = redis.call('ZRANGEBYSCORE', ends, '-inf', now, 'LIMIT', 0, args.most)
redis.call('ZREM', ends, '') -- after a deletion, a full Redis rejects no write of the script
for _, key in ipairs(due) do
  end_now(key)
end
redis.call('SET', clock, now)
return #due
