-- sample_requeue: requeue the sample requests of a worker, running now or at its crash. Fenced by the worker's epoch.
-- needs: sample_put_back
local epoch_key, refs, notify = unpack(KEYS)
local args = cjson.decode(ARGV[1])
local epoch = args.epoch

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
local resolved = {}
local count = put_back(args.prefix, args.worker, args.crashes, refs, args.lives, args.cancel, resolved)
redis.call('PUBLISH', notify, table.concat(resolved, '\n'))
return count
