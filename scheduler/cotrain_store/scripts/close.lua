-- close: end a run. A client that asks for it gets its answer as a request's result.
-- A worker is fenced by its epoch: a replaced one sees a log that has moved on.
local record_key, notify, epoch_key = KEYS[1], KEYS[2], KEYS[3]
local run, prefix, ttl_ms, request, result, failure = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local state, tenant, epoch = ARGV[7], ARGV[8], ARGV[9]

if epoch_key and redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
local resolved = close_run(prefix, run, tenant, state, failure, ttl_ms)
if not resolved and redis.call('HGET', record_key, 'state') ~= 'closed' then
  return 'GONE'
end
resolved = resolved or {} -- the run of a copied checkpoint never had a log
if request ~= '' then
  put_result(request, result, ttl_ms)
  resolved[#resolved + 1] = request
end
redis.call('PUBLISH', notify, table.concat(resolved, '\n'))
return 'OK'
