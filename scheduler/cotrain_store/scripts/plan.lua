-- plan: write one worker's step of a cycle and advance its runs. Atomic.
-- Fenced by the scheduler's epoch. Refused if the queue has changed since planning, or the worker hands over.
-- needs: fence, ages
-- The step follows `args`. `args.runs` has the first seq and the logged ops of each run. The scheduler has read
-- all changes up to `args.seen`, so they are deleted.
local prefix, worker, cycle, step = args.prefix, args.worker, args.cycle, ARGV[2]
local counter, open = prefix .. 'cycle', prefix .. 'open:' .. worker

if tonumber(redis.call('GET', counter) or 0) ~= cycle - 1 or redis.call('HLEN', open) >= args.max_open then
  return 'OUTDATED'
end
local heartbeat = redis.call('GET', prefix .. 'worker:' .. worker)
if heartbeat and cjson.decode(heartbeat).is_handing_over then
  return 'OUTDATED' -- published after the scheduler read the heartbeat
end
for _, part in ipairs(args.runs) do
  local log = redis.call('HMGET', prefix .. 'log:' .. part.run, 'state', 'next', 'worker')
  if log[1] ~= 'live' or tonumber(log[2]) ~= part.first then
    return 'OUTDATED'
  end
  if log[3] and log[3] ~= worker and redis.call('SISMEMBER', prefix .. 'workers', log[3]) == 1 then
    return 'OUTDATED' -- the run has another worker
  end
  for i, envelope in ipairs(part.ops) do
    if redis.call('HGET', prefix .. 'ops:' .. part.run, part.first + i - 1) ~= envelope then
      return 'OUTDATED'
    end
  end
end

for _, part in ipairs(args.runs) do
  local run, next_seq = part.run, part.first + #part.ops
  local log = prefix .. 'log:' .. run
  redis.call('HSET', log, 'next', next_seq, 'worker', worker)
  if redis.call('HEXISTS', prefix .. 'ops:' .. run, next_seq) == 0 then
    redis.call('ZREM', prefix .. 'ready', run)
    if tonumber(redis.call('HGET', log, 'last')) >= next_seq then
      redis.call('ZADD', prefix .. 'gaps', 'NX', clock_in(0), run)
    end
  else
    redis.call('ZADD', prefix .. 'ready', 'XX', args.planned_ms, run) -- its run was served now
  end
end
redis.call('ZREMRANGEBYSCORE', prefix .. 'changed', '-inf', args.seen)
redis.call('SET', counter, cycle)
redis.call('HSET', open, cycle, step)
redis.call('PUBLISH', prefix .. 'notify:' .. worker, cycle)
return 'OK'
