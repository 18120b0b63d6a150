-- reassign: transfer the work of a worker without a heartbeat to its successor, another worker of its pool.
-- Fenced by the scheduler's epoch and by the lost worker's own. The latter is increased, which fences the lost
-- worker's process in case it still runs. Idempotent.
-- needs: fence, sample_put_back, pool_leave, changed
-- The successor receives the work that one worker must do: open steps, unstored weights, and the runs of both.
-- The other runs have no worker afterwards, because the lost one is removed from the workers.
local prefix, dead, successor = args.prefix, args.dead, args.successor
local dead_epoch = prefix .. 'epoch:' .. dead

if redis.call('SISMEMBER', prefix .. 'workers', dead) == 0 then
  return 'OK'
end
if redis.call('GET', dead_epoch) ~= args.seen_epoch or redis.call('EXISTS', prefix .. 'worker:' .. dead) == 1
  or redis.call('EXISTS', prefix .. 'worker:' .. successor) == 0 then
  return 'OUTDATED'
end
local open, runs = redis.call('HGETALL', prefix .. 'open:' .. dead), {}
for i = 2, #open, 2 do -- before any write: those of a failed script are not undone
  for _, op in ipairs(cjson.decode(open[i]).ops) do
    runs[op.run] = true
  end
end

redis.call('INCR', dead_epoch)
for i = 1, #open, 2 do -- unchanged: a step of another worker counts as crashed
  redis.call('HSET', prefix .. 'open:' .. successor, open[i], open[i + 1])
end

local unstored = prefix .. 'unstored:' .. dead
for _, ref in ipairs(redis.call('SMEMBERS', unstored)) do
  if redis.call('HEXISTS', 'cotrain:weights:' .. ref, 'worker') == 1 then
    redis.call('HSET', 'cotrain:weights:' .. ref, 'worker', successor)
    redis.call('SADD', prefix .. 'unstored:' .. successor, ref)
    runs[string.match(ref, '^(.*):[^:]*$')] = true
    for _, user in ipairs(redis.call('SMEMBERS', 'cotrain:weights:' .. ref .. ':users')) do
      local fork = string.match(user, '^l:{[^}]*}:(.*):%d+$')
      if fork and redis.call('HGET', prefix .. 'log:' .. fork, 'worker') == dead then
        runs[fork] = true
      end
    end
  end
end
for run in pairs(runs) do
  redis.call('HSET', prefix .. 'log:' .. run, 'worker', successor)
  record_change(prefix, run)
end

local resolved = {}
put_back(prefix, dead, 1, args.lives, args.cancel, resolved)
leave_pool(prefix, dead, successor, args.any_worker)
redis.call('DEL', prefix .. 'open:' .. dead, unstored)
redis.call('HINCRBY', prefix .. 'counters', 'reassignments', 1)
redis.call('PUBLISH', 'cotrain:notify:results', table.concat(resolved, '\n'))
redis.call('PUBLISH', prefix .. 'notify:' .. successor, 'successor')
return 'OK'
