-- forget: delete the log of a closed run that its worker has dropped. Refused while an op of it is planned, or
-- while only the log can recreate the weights of a save.
-- needs: fence, run_bytes, spool_refs
local prefix, run = args.prefix, args.run
local log, ops = prefix .. 'log:' .. run, prefix .. 'ops:' .. run

local row = redis.call('HMGET', log, 'next', 'done')
if row[1] and tonumber(row[1]) > tonumber(row[2]) + 1 then
  return 'PLANNED'
end
for _, seq in ipairs(redis.call('HKEYS', ops)) do
  if redis.call('HGET', 'cotrain:weights:' .. run .. ':' .. seq, 'digest') == '' then
    return 'UNSTORED'
  end
end
local logged = redis.call('HGETALL', ops)
for i = 1, #logged, 2 do
  local seq, envelope = logged[i], logged[i + 1]
  redis.call('HDEL', log, 'step:' .. seq, 'rewind:' .. seq)
  release_body(envelope)
end
redis.call('DEL', ops, prefix .. 'bodies:' .. run, prefix .. 'digests:' .. run, prefix .. 'riders:' .. run)
redis.call('HDEL', log, 'snapfile', 'snapsha', 'oldfile', 'oldsha') -- its files are now unreferenced
release_run(log)
redis.call('SREM', prefix .. 'drops:' .. args.worker, run)
return 'OK'
