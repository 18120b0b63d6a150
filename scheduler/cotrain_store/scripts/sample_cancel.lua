-- sample_cancel: cancel a sample request. A waiting request ends here, and a running one ends on its worker.
-- A request that is unknown, another tenant's or done stays unchanged.
-- needs: sample_finish
local args = cjson.decode(ARGV[1])
local request, cancel = args.request, args.cancel

local row = redis.call('HMGET', 'cotrain:sample:' .. request, 'tenant', 'state', 'prefix', 'holder')
if row[1] ~= args.tenant then
  return 'UNKNOWN'
end
if row[2] == 'waiting' then
  finish(args.lives, request, cancel.result, cancel.ttl_ms, 1, cancel.size)
  redis.call('PUBLISH', 'cotrain:notify:results', request)
elseif row[2] == 'claimed' then
  local prefix, worker = row[3], row[4]
  redis.call('SADD', prefix .. 'cancelled:' .. worker, request)
  redis.call('PUBLISH', prefix .. 'notify:' .. worker, request)
end
return 'OK'
