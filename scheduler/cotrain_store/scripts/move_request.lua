-- move_request: request the move of a run to another worker of its pool. Its owner hands it over (`move`) once a
-- recovery copy contains all of it. Until then nothing more of it is planned. Idempotent.
-- Fenced by the scheduler's epoch if the scheduler calls it. Refused within `quiet_ms` after its last move.
local args = cjson.decode(ARGV[1])
local prefix, workers = args.prefix, args.prefix .. 'workers'

if args.fence and redis.call('GET', args.fence) ~= args.epoch then
  return 'FENCED'
end
local row = redis.call('HMGET', prefix .. 'log:' .. args.run, 'state', 'worker', 'moved_ms')
if row[1] ~= 'live' then
  return 'ENDED'
end
if redis.call('SISMEMBER', workers, args.to) == 0 or redis.call('EXISTS', prefix .. 'worker:' .. args.to) == 0 then
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
redis.call('HSET', prefix .. 'moves', args.run, row[2] .. '>' .. args.to)
redis.call('PUBLISH', prefix .. 'notify:' .. row[2], 'move')
return 'OK'
