-- move: hand a run over from its owner to the requested worker. Atomic. Fenced by the owner's epoch.
-- Refused while an op of the run is planned, or if no recovery copy contains all committed ops. The target
-- therefore replays nothing. A move that has become impossible is deleted.
-- needs: fence, changed
local prefix, run = args.prefix, args.run
local moves, log = prefix .. 'moves', prefix .. 'log:' .. run

if redis.call('HGET', moves, run) ~= args.worker .. '>' .. args.to then
  return 'OUTDATED'
end
local row = redis.call('HMGET', log, 'state', 'worker', 'next', 'done', 'snap', 'source')
local heartbeat = redis.call('GET', prefix .. 'worker:' .. args.to)
if row[1] ~= 'live' or row[2] ~= args.worker or redis.call('SISMEMBER', prefix .. 'workers', args.to) == 0
  or not heartbeat or cjson.decode(heartbeat).is_handing_over then
  redis.call('HDEL', moves, run)
  return 'OUTDATED'
end
if tonumber(row[3]) ~= tonumber(row[4]) + 1 or args.in_memory and row[5] ~= row[4] then
  return 'EARLY'
end
if row[4] == '-1' and row[6] and redis.call('HGET', 'cotrain:weights:' .. row[6], 'digest') == '' then
  return 'EARLY' -- a fork that has not run yet, from weights that only its owner has
end
redis.call('HSET', log, 'worker', args.to, 'moved_ms', string.format('%.0f', args.now_ms))
redis.call('HDEL', log, 'begun') -- an open pass restarts on the target
redis.call('HDEL', moves, run)
redis.call('HINCRBY', prefix .. 'counters', 'moves', 1)
record_change(prefix, run)
redis.call('PUBLISH', 'cotrain:notify:scheduler', 'ready ' .. string.match(prefix, '{.*$') .. args.to)
return 'OK'
