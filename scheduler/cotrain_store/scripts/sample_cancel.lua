-- sample_cancel: a client wants a sample request no more. A waiting one ends here, a running one
-- where it runs; one that is unknown, another tenant's or done is left as it is.
local sample, refs, notify = KEYS[1], KEYS[2], KEYS[3]
local request, tenant, result, ttl_ms, size = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local lives = { record = tonumber(ARGV[6]), told = tonumber(ARGV[7]) }

local row = redis.call('HMGET', sample, 'tenant', 'state', 'prefix', 'holder')
if row[1] ~= tenant then
  return 'UNKNOWN'
end
if row[2] == 'waiting' then
  finish(refs, lives, request, result, ttl_ms, 1, size)
  redis.call('PUBLISH', notify, request)
elseif row[2] == 'claimed' then
  redis.call('SADD', row[3] .. 'cancelled:' .. row[4], request)
  redis.call('PUBLISH', row[3] .. 'notify:' .. row[4], request)
end
return 'OK'
