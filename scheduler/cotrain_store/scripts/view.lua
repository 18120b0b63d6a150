-- view: return all that one tick of the scheduler reads, from one moment. Read-only.
-- needs: queue_row
-- Returns, in this order: the next change number, a flag for completeness, the number of ready runs, and the number of
-- the last cycle. Then the workers (id, epoch, heartbeat, open steps), the requested moves, and the queues. These are
-- of `args.runs`, and of the runs that changed since `args.since` in the order of the changes.
local args, slots, rows = cjson.decode(ARGV[1]), {}, {}
local prefix = args.prefix

for _, worker in ipairs(redis.call('SMEMBERS', prefix .. 'workers')) do
  local epoch, heartbeat = unpack(redis.call('MGET', prefix .. 'epoch:' .. worker, prefix .. 'worker:' .. worker))
  slots[#slots + 1] = { worker, epoch or '0', heartbeat or '', redis.call('HLEN', prefix .. 'open:' .. worker) }
end

for _, run in ipairs(args.runs) do
  rows[#rows + 1] = queue_row(prefix, run, args.max_ops_per_run)
end
local found = redis.call('ZRANGEBYSCORE', prefix .. 'changed', '(' .. args.since, '+inf', 'WITHSCORES',
  'LIMIT', 0, args.max_runs)
for i = 1, #found, 2 do
  rows[#rows + 1] = queue_row(prefix, found[i], args.max_ops_per_run)
end
local is_all = #found < 2 * args.max_runs
local reached = is_all and redis.call('GET', prefix .. 'changes') or found[#found] or '0'
local ready, cycle = redis.call('ZCARD', prefix .. 'ready'), redis.call('GET', prefix .. 'cycle') or '0'
return { reached, is_all and 1 or 0, ready, cycle, slots, redis.call('HGETALL', prefix .. 'moves'), rows }
