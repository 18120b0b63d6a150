-- move_ask: request the move of a run to another worker of its pool. Its owner hands it over (`move`) once a
-- recovery copy contains all of it. Until then nothing more of it is planned. Idempotent.
-- Fenced by the scheduler's epoch if the scheduler calls it. Refused within `quiet_ms` after its last move.
local scheduler_epoch, moves, workers, log, to_heartbeat = unpack(KEYS)
local args = cjson.decode(ARGV[1])

if args.epoch and redis.call('GET', scheduler_epoch) ~= args.epoch then
  return 'FENCED'
end
local row = redis.call('HMGET', log, 'state', 'worker', 'moved_ms')
if row[1] ~= 'live' then
  return 'ENDED'
end
if redis.call('SISMEMBER', workers, args.to) == 0 or redis.call('EXISTS', to_heartbeat) == 0 then
  return 'TARGET'
end
if not row[2] or redis.call('SISMEMBER', workers, row[2]) == 0 then
  return 'UNOWNED'
end
if row[2] == args.to then
  return 'THERE'
end
if row[3] and args.now_ms - tonumber(row[3]) < args.quiet_ms then
  return 'SOON'
end
redis.call('HSET', moves, args.run, row[2] .. '>' .. args.to)
redis.call('PUBLISH', args.prefix .. 'notify:' .. row[2], 'move')
return 'OK'
