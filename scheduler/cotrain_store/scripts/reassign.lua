-- reassign: transfer the work of a worker without a heartbeat to its successor, another worker of its pool.
-- Fenced by the scheduler's epoch and by the lost worker's own. The latter is increased, which fences the lost
-- worker's process in case it still runs. Idempotent.
-- needs: fence, sample_put_back, changed
-- The successor receives the work that one worker must do: open steps, unstored weights, and the runs of both.
-- The other runs have no worker afterwards, because the lost one is removed from the workers.
local prefix, dead, successor, any_worker = args.prefix, args.dead, args.successor, args.any_worker
local workers, dead_epoch = prefix .. 'workers', prefix .. 'epoch:' .. dead

if redis.call('SISMEMBER', workers, dead) == 0 then
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
redis.call('SREM', workers, dead)
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
  note_change(prefix, run)
end

local resolved = {}
put_back(prefix, dead, 1, args.lives, args.cancel, resolved)
for _, tenant in ipairs(redis.call('SMEMBERS', prefix .. 'tenants')) do
  local waiting = prefix .. 'waiting:' .. dead .. ':' .. tenant
  local request = redis.call('RPOP', waiting)
  while request do
    local sample = 'cotrain:sample:' .. request
    local weights = redis.call('HGET', sample, 'weights')
    local is_unstored = redis.call('HGET', 'cotrain:weights:' .. weights, 'digest') == ''
    local queue = is_unstored and successor or any_worker
    redis.call('HSET', sample, 'lane', queue)
    redis.call('LPUSH', prefix .. 'waiting:' .. queue .. ':' .. tenant, request)
    request = redis.call('RPOP', waiting)
  end
end

local drops, its_drops = prefix .. 'drops:' .. successor, prefix .. 'drops:' .. dead
redis.call('SUNIONSTORE', drops, drops, its_drops)
redis.call('DEL', prefix .. 'open:' .. dead, unstored, its_drops)
redis.call('HINCRBY', prefix .. 'counters', 'reassignments', 1)
redis.call('PUBLISH', 'cotrain:notify:results', table.concat(resolved, '\n'))
redis.call('PUBLISH', prefix .. 'notify:' .. successor, 'successor')
return 'OK'
