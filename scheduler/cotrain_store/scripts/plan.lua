-- plan: write one worker's step of a cycle and move its runs forward. All of it or nothing.
-- Fenced by the scheduler's epoch; refused when the queue is not as the planner saw it.
local epoch_key, counter, open, ready, gaps, wake = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local epoch, prefix, worker, cycle, step = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local max_open = tonumber(ARGV[6])
local FIRST = 7 -- then, for each run: run, first seq, count

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
if tonumber(redis.call('GET', counter) or 0) ~= cycle - 1 or redis.call('HLEN', open) >= max_open then
  return 'OUTDATED'
end
for i = FIRST, #ARGV, 3 do
  local run, first, count = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local log = redis.call('HMGET', prefix .. 'log:' .. run, 'state', 'next', 'worker')
  if log[1] ~= 'live' or tonumber(log[2]) ~= first then
    return 'OUTDATED'
  end
  if log[3] and log[3] ~= worker and redis.call('SISMEMBER', prefix .. 'workers', log[3]) == 1 then
    return 'OUTDATED' -- another one has it
  end
  for seq = first, first + count - 1 do
    if redis.call('HEXISTS', prefix .. 'ops:' .. run, seq) == 0 then
      return 'OUTDATED'
    end
  end
end

for i = FIRST, #ARGV, 3 do
  local run, next_seq = ARGV[i], tonumber(ARGV[i + 1]) + tonumber(ARGV[i + 2])
  local log = prefix .. 'log:' .. run
  redis.call('HSET', log, 'next', next_seq, 'worker', worker)
  if redis.call('HEXISTS', prefix .. 'ops:' .. run, next_seq) == 0 then
    redis.call('ZREM', ready, run)
    if tonumber(redis.call('HGET', log, 'last')) >= next_seq then
      redis.call('ZADD', gaps, 'NX', clock_in(0), run)
    end
  end
end
redis.call('SET', counter, cycle)
redis.call('HSET', open, cycle, step)
redis.call('PUBLISH', wake, cycle)
return 'OK'
