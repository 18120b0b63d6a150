-- scaling: store the scheduler's decision on a pool's number of workers. Fenced by the scheduler's epoch.
-- The record follows `args`.
local epoch_key, scaling = unpack(KEYS)
local args = cjson.decode(ARGV[1])

if redis.call('GET', epoch_key) ~= args.epoch then
  return 'FENCED'
end
redis.call('SET', scaling, ARGV[2])
return 'OK'
