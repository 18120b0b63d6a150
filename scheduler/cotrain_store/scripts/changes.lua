-- changes: return the queues that changed since a change number, in the order of the changes. Read-only.
-- needs: queue_row
-- Returns the next change number, a flag for completeness, the number of ready runs, and the queues.
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
