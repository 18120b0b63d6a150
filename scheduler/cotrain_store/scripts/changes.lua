-- changes: read the queues that changed since a number, in that order. Changes nothing; twice is harmless.
-- needs: queue_row
-- Answers the number to ask for next, whether these are all, how many runs are ready, and the queues.
local changed, counter, ready = unpack(KEYS)
local args, rows = cjson.decode(ARGV[1]), {}

local since = string.format('(%.0f', args.since)
local found = redis.call('ZRANGEBYSCORE', changed, since, '+inf', 'WITHSCORES', 'LIMIT', 0, args.max_runs)
for i = 1, #found, 2 do
  rows[#rows + 1] = queue_row(args.prefix, found[i], args.max_ops_per_run)
end
local is_all = #rows < args.max_runs
local reached = is_all and redis.call('GET', counter) or found[#found] or '0'
return { reached, is_all and 1 or 0, redis.call('ZCARD', ready), rows }
