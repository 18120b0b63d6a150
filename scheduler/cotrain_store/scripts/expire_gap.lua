-- expire_gap: fail the ops that wait for a missing seq. The gap remains and nothing is skipped. If the missing op
-- arrives, it runs, and the failed ops keep their failure. Later ops after the gap have the age of the gap.
-- needs: fence, reject, given_up, idle_tenant
local prefix, run, tenant, missing = args.prefix, args.run, args.tenant, args.missing
local log, ops_key, gaps = prefix .. 'log:' .. run, prefix .. 'ops:' .. run, prefix .. 'gaps'

local row = redis.call('HMGET', log, 'next', 'last')
local since = redis.call('ZSCORE', gaps, run)
if tonumber(row[1]) ~= missing or redis.call('HEXISTS', ops_key, missing) == 1 or not since then
  return 'OK'
end
redis.call('ZREM', gaps, run)
local resolved, ops, bytes = {}, 0, 0
for seq = missing + 1, tonumber(row[2]) do
  reject(prefix, run, tenant, seq, args.failure, resolved)
  local size = string.match(redis.call('HGET', ops_key, seq) or '', '^[^|]*|%d+|(%d+)')
  if size then
    ops, bytes = ops + 1, bytes + tonumber(size)
  end
end
set_given_up(log, prefix .. 'queue:' .. tenant, ops, bytes, since)
remove_if_idle(prefix, tenant)
redis.call('PUBLISH', 'cotrain:notify:results', table.concat(resolved, '\n'))
return 'OK'
