-- sample_requeue: put back what a worker runs, or ran when it died. Fenced by the worker's epoch.
local epoch_key, refs, notify = KEYS[1], KEYS[2], KEYS[3]
local epoch, prefix, worker, deaths = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local cancel = { result = ARGV[5], ttl = tonumber(ARGV[6]), size = ARGV[7] }
local lives = { record = tonumber(ARGV[8]), told = tonumber(ARGV[9]) }

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
local resolved = {}
local count = put_back(prefix, worker, deaths, refs, lives, cancel, resolved)
redis.call('PUBLISH', notify, table.concat(resolved, '\n'))
return count
