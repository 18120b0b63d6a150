-- checkpoint_replace: write a checkpoint anew, if it still is what the writer read.
local checkpoint = KEYS[1]
local before, after = ARGV[1], ARGV[2]

if redis.call('GET', checkpoint) ~= before then
  return 'OUTDATED'
end
write_checkpoint(after, cjson.decode(after))
return 'OK'
