-- expire_gap: fail the ops that wait for a missing seq. The gap remains and nothing is skipped. If the missing op
-- arrives, it runs, and the failed ops keep their failure. Later ops after the gap have the age of the gap.
-- needs: reject, given_up, idle_tenant
local epoch_key, gaps, log, ops_key, bodies, refs, queue, notify = unpack(KEYS)
local args = cjson.decode(ARGV[1])
local run, missing = args.run, args.missing
local of_run = { ops = ops_key, bodies = bodies, refs = refs, queue = queue }

if redis.call('GET', epoch_key) ~= args.epoch then
  return 'FENCED'
end
local row = redis.call('HMGET', log, 'next', 'last')
local since = redis.call('ZSCORE', gaps, run)
if tonumber(row[1]) ~= missing or redis.call('HEXISTS', ops_key, missing) == 1 or not since then
  return 'OK'
end
redis.call('ZREM', gaps, run)
local resolved, ops, bytes = {}, 0, 0
for seq = missing + 1, tonumber(row[2]) do
  reject(of_run, run, seq, args.failure, resolved)
  local size = string.match(redis.call('HGET', ops_key, seq) or '', '^[^|]*|%d+|(%d+)')
  if size then
    ops, bytes = ops + 1, bytes + tonumber(size)
  end
end
set_given_up(log, queue, ops, bytes, since)
strike_if_idle(args.prefix, args.tenant)
redis.call('PUBLISH', notify, table.concat(resolved, '\n'))
return 'OK'
