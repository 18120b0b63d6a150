-- sample_requeue: put back what a worker runs, or ran when it crashed. Fenced by the worker's epoch.
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
