-- tick: advance the store's clock, and end due keys, at most `most` at a time. Fenced by the scheduler's epoch.
-- needs: fence, ages
local now = clock_in(args.passed_ms)
local due = redis.call('ZRANGEBYSCORE', 'cotrain:ends', '-inf', now, 'LIMIT', 0, args.most)
redis.call('ZREM', 'cotrain:ends', '') -- after a deletion, a full Redis rejects no write of the script
for _, key in ipairs(due) do
  end_now(key)
end
redis.call('SET', 'cotrain:clock', now)
return #due
