-- reassign: nobody has been at a worker's place for long: give what it had to another of its pool.
-- Fenced by the scheduler's epoch and by the place's own. That one grows: should its last process still
-- live, it can write nothing any more. Twice is harmless.
-- The heir gets what one worker must do (open steps, owed weights, and the runs of both); the other runs
-- have no worker any more, because the place is no longer among the workers.
local scheduler_epoch, workers, place_epoch = KEYS[1], KEYS[2], KEYS[3]
local place_beat, heir_beat, refs, notify, counters = KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local epoch, prefix, place, seen_epoch, heir, any_lane = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local cancel = { result = ARGV[7], ttl = tonumber(ARGV[8]), size = ARGV[9] }
local lives = { record = tonumber(ARGV[10]), told = tonumber(ARGV[11]) }

if redis.call('GET', scheduler_epoch) ~= epoch then
  return 'FENCED'
end
if redis.call('SISMEMBER', workers, place) == 0 then
  return 'OK'
end
if redis.call('GET', place_epoch) ~= seen_epoch or redis.call('EXISTS', place_beat) == 1
  or redis.call('EXISTS', heir_beat) == 0 then
  return 'OUTDATED'
end
local open, runs = redis.call('HGETALL', prefix .. 'open:' .. place), {}
for i = 2, #open, 2 do -- before anything is written: a script that fails undoes nothing
  for _, op in ipairs(cjson.decode(open[i]).ops) do
    runs[op.run] = true
  end
end

redis.call('INCR', place_epoch)
redis.call('SREM', workers, place)
for i = 1, #open, 2 do -- as they stand: that another was to run them tells that it died over them
  redis.call('HSET', prefix .. 'open:' .. heir, open[i], open[i + 1])
end

local owed = prefix .. 'unstored:' .. place
for _, ref in ipairs(redis.call('SMEMBERS', owed)) do
  if redis.call('HEXISTS', 'cotrain:weights:' .. ref, 'worker') == 1 then
    redis.call('HSET', 'cotrain:weights:' .. ref, 'worker', heir)
    redis.call('SADD', prefix .. 'unstored:' .. heir, ref)
    runs[string.match(ref, '^(.*):[^:]*$')] = true
  end
end
for run in pairs(runs) do
  redis.call('HSET', prefix .. 'log:' .. run, 'worker', heir)
end

local resolved = {}
put_back(prefix, place, 1, refs, lives, cancel, resolved)
for _, tenant in ipairs(redis.call('SMEMBERS', prefix .. 'tenants')) do
  local waiting = prefix .. 'waiting:' .. place .. ':' .. tenant
  local request = redis.call('RPOP', waiting)
  while request do
    local sample = 'cotrain:sample:' .. request
    local weights = redis.call('HGET', sample, 'weights')
    local is_owed = redis.call('HGET', 'cotrain:weights:' .. weights, 'digest') == ''
    local lane = is_owed and heir or any_lane
    redis.call('HSET', sample, 'lane', lane)
    redis.call('LPUSH', prefix .. 'waiting:' .. lane .. ':' .. tenant, request)
    request = redis.call('RPOP', waiting)
  end
end

local drops = prefix .. 'drops:'
redis.call('SUNIONSTORE', drops .. heir, drops .. heir, drops .. place)
redis.call('DEL', prefix .. 'open:' .. place, owed, drops .. place)
redis.call('HINCRBY', counters, 'reassignments', 1)
redis.call('PUBLISH', notify, table.concat(resolved, '\n'))
redis.call('PUBLISH', prefix .. 'notify:' .. heir, 'heir')
return 'OK'
